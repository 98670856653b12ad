"""What is measured against each other: selfspec and its peers behind one protocol."""
