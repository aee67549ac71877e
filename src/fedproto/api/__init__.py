"""The same from Python as from the command line: train, sweep, load, analyse, predict."""
