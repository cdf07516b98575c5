"""`engine bench`: load for engines and servers, figures of the results, and the time of a step by kernel."""
