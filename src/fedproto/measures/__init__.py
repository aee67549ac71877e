"""Measures: what is taken of aggregate models every few rounds, one file each."""
