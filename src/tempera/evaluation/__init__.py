"""Generation runs, quality metrics and reports."""
