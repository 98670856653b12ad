"""Does a small model copy, and what do copied drafts gain?"""
