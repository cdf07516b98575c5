"""The page at /: a chat and charts, in the HTML, style and scripts beside this file."""
