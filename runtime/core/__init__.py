"""The loop that schedules, runs and samples the steps of one engine, and the requests that it serves."""
