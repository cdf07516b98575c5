"""Grammars that answers follow: llguidance compiles and walks them in processes of their own."""
