"""What can be chosen: typed options, and classes by the names that users write."""

from fedproto.options.base import (
    Description,
    Options,
    describe,
    option,
    options_to_dict,
    plain,
    read_options,
)

__all__ = [
    "Description",
    "Options",
    "describe",
    "option",
    "options_to_dict",
    "plain",
    "read_options",
]
