"""What `engine bench` does: load for engines and servers, figures of what came of it, and a step's time by kernel."""
