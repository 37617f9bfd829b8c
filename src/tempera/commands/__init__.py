"""The bodies of the commands, one module each; `scripts` holds their entry points."""
