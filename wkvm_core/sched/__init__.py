"""Who runs next: requests in, plans out, results in, outcomes out. Never imports torch."""
