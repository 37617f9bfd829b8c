"""Acceptance rules: which drafted tokens are kept, and what replaces a rejected one."""
