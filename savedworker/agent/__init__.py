"""The program on the instance: wins the lease, starts or restores, checkpoints on notice, ships logs; and the shim beside the worker.

May import: fleet and everything below it.
"""
