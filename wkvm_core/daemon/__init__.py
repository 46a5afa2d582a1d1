"""The process: configuration, threads, composition. The only room that reads messages."""
