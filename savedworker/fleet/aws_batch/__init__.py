"""Jobs of AWS Batch on EC2, one for each launch, over several queues.

May import: what fleet may import, and ``fleet.aws``.
"""

from savedworker.fleet.aws_batch.fleet import BatchFleet

__all__ = ["BatchFleet"]
