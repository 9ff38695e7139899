"""Instances of EC2, one for each launch, by CreateFleet over types and subnets.

May import: what fleet may import, and ``fleet.aws``.
"""

from savedworker.fleet.ec2.fleet import Ec2Fleet

__all__ = ["Ec2Fleet"]
