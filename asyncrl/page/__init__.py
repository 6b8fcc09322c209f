"""A page in the browser that shows runs: those that train, those that have ended, and damaged ones.

It reads the folders of runs and nothing else, and changes nothing: ``timeline`` draws events into bins, ``runs``
answers the questions of the views, ``server`` serves them on loopback.
"""
