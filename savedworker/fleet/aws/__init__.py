"""What the fleets ``ec2`` and ``aws_batch`` share: calls with bounded retries, the meaning of AWS's errors, tags, agents' commands.

Only ``session`` imports boto3 (and botocore, tenacity), on first use. ``metadata`` and ``secret`` are for instances: standard library only.
"""
