"""Everything that is read was written by somebody else. Here each parser gets what no friend would write."""
