// Whether this CPU has tiles (AMX) whose shape nobody tells.
//
// Some hypervisors pass AMX on to their guests and leave out the page of CPUID that says how large its tiles are
// (0x1D). A library that goes by that page, as oneDNN in torch does, configures tiles of size zero, and the first
// instruction that uses them ends the process.
#pragma once

namespace argosy {

bool tiles_are_hidden();

}  // namespace argosy
