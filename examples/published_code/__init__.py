"""Methods as their public code computes them, where it departs from the paper: for comparisons with
published numbers. README.md has the commands.
"""
