"""What adapters after the exits of a frozen model are worth."""
