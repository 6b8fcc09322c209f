"""Reward rules: they score answers, by the name of a rule, by data source, or with a user's function.

    answer --rule chosen by data_source--> verdict: a score and its parts

A rule that cannot judge raises an error; a failure never becomes a score.
"""
