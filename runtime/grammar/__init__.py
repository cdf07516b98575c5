"""Grammars that answers follow: compiled and walked by llguidance in processes of their own."""
