# SPDX-License-Identifier: Apache-2.0
"""A trainer that can be read: data, configuration, the loop and what guards it."""
