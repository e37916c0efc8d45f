"""Start of each Python process that a command of `support.bare_python` starts: it lacks the same features."""

import os

if os.environ.get("ANABRANCH_BARE"):
    from support.bare_python import FEATURES

    for feature in os.environ["ANABRANCH_BARE"].split(","):
        FEATURES[feature]()
