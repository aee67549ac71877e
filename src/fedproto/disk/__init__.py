"""Files: written whole or not at all, locked, fingerprinted, no larger than allowed."""
