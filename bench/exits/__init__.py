"""What adapters behind the exits of a frozen model are worth."""
