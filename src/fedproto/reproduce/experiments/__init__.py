"""Tables and figures, one file each; found by the registry in `fedproto.reproduce.base`."""
