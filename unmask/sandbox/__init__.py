"""Running programs that nobody has read: isolated, bounded, and judged from outside."""
