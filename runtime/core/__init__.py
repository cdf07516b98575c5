"""The core of an engine, which schedules, runs and samples its steps, and the requests that it serves."""
