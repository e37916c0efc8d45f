from anabranch.train.numerics import configure

configure(threads=1)
