"""The executor on CPUs."""
