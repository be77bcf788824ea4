// All that computes, for whichever vectors it is read for: a part of step.cpp, twice.

#include "numbers.h"
#include "products.h"
#include "attention.h"
#include "logits.h"
#include "forward.h"
#include "head.h"
