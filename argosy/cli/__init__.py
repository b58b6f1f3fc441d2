"""The command line: `argosy run`, `argosy secret`, `argosy simulate`."""
