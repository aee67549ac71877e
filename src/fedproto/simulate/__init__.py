"""Runs from beginning to end: what their configurations name, their engine, their directories."""

from fedproto.simulate.stored import (
    check_assignment,
    initial_state,
    load_federations,
    model_for,
    simulate,
)

__all__ = ["check_assignment", "initial_state", "load_federations", "model_for", "simulate"]
