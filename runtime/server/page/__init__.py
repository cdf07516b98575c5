"""The web page at /: a chat and charts, with its HTML, style and scripts."""
