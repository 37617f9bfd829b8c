"""What the commands do, one module each; `scripts` holds their entry points."""
