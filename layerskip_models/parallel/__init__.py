"""One model over several processes: which part of a weight a rank holds, how it is read, what ranks tell each other."""
