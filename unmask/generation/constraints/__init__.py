"""Text that has to match: constraints as automata over tokens."""
