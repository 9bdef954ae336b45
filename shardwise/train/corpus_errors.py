# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with data. Every message names the value, the reason and the fix."""


class DataError(ValueError):
    """Data that can't be trained on."""


class DataNotFoundError(DataError):
    """Nothing has the name that was given."""


class EmptyDataError(DataError):
    """There is something of that name, but no text in it."""


class ShortDataError(DataError):
    """There is text, but less than one window of it."""


class TokenFileError(DataError):
    """A token file that can't be read as one."""


class MissingExtraError(DataError, ImportError):
    """A package that only this kind of data needs is not installed."""


class DataPositionError(DataError):
    """A saved position in other data than these."""
