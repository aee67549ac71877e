"""Files: written atomically, locked, fingerprinted, within size limits."""
