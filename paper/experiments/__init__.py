"""Tables and figures, one file each; found by the registry in `paper.base`."""
