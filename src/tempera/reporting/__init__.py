"""Reports: tables, figures and comparisons of runs."""
