"""Which loss for the exits: runs that differ in the weights of the tokens alone, and what each makes of the drafts."""
