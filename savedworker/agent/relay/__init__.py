"""The relay: the worker's only way to its engine's interface, at the same inner address on every instance.

``server`` takes requests from the worker, ``gate`` holds them around a freeze, ``airflow`` knows what they mean, ``upstream`` carries
them, ``journal`` recognises those that are repeated after a loss. Of ``savedworker`` it imports the store and the model only.
"""
