"""Rules that say how good an answer is: by name, by data source, or a function of one's own.

    answer --rule chosen by data_source--> verdict: a score, and the parts it was made of

A rule that cannot judge raises; no failure becomes a score.
"""
