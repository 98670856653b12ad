"""Do the rows of a published table follow from one of them? The acceptance rate of fixed drafts foretells the others."""
