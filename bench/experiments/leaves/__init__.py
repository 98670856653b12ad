"""Would second choices of an exit be worth verifying?"""
