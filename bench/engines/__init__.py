"""What is measured against each other: selfspec and its peers, with one protocol."""
