"""The paper's tables and figures, each from runs that are planned, found or trained.

`printed.toml` is what the paper prints, `scales.toml` how its recipes become small, `experiments/`
holds one file per table or figure. An experiment says which runs it wants; the `Library` knows
which of them exist; `reproduction` trains the rest and lets the experiment draw.
"""

from paper import baselines, measures, settings  # registered for the runs that have them

__all__ = ["baselines", "measures", "settings"]
