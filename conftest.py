"""Property tests have the same examples on every machine, and an example may take as long as the machine needs.

HYPOTHESIS_PROFILE=random draws new examples, as CI does in its second run; a failure then prints how to repeat it.
"""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
