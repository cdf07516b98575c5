"""Several processes that compute one model together, and what they tell each other."""
