"""Does a plan on the device: state bank, lanes, staging, sampler, runner."""
